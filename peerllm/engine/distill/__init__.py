"""Makes a draft model for a target out of the target alone.

options     what is made (the recipe), and how on this machine
target      the target whole, and the checks that come before hours are spent
prompts     prompts of a file, of the target's own, and which are held out
answers     the target's answers, by `engine.batch`
student     the small model and the tokens of its head
loss        the target's full distribution against the student's, in pieces
training    batches, optimiser, schedule, a smaller batch where memory ends
evaluation  agreement and tokens per round on answers that were held out
gain        times of a round's parts, and what a draft gains at a round trip
files       what is written whole or not at all
folder      the draft's folder, its model card, a whole Hugging Face model of it
checkpoint  all that a stopped run needs to go on
plot        the run's figures as SVG
run         all of it in order
bench       how fast answers are made: `python3 -m peerllm.engine.distill.bench`
"""

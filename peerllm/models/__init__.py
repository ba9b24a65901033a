"""Find, fetch, convert and slice weights; the tokenizer."""

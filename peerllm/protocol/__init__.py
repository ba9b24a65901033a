"""Plain types that the parts of peerllm share: messages, limits, errors. No I/O, no tensors, no clocks.

`errors`, `limits`, `requests`, `identity`, `tensors` and `pipe` need nothing but the standard library, so that
`peerllm.engine` can import them on a machine that has torch and transformers alone. `cbor` and `messages` need cbor2.
"""

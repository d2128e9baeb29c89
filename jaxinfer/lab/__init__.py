"""The GQA/MQA lab: convert a model to fewer KV heads, uptrain it, evaluate it, and compare, on one engine."""

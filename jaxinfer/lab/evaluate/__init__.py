"""What a model is worth: perplexity, last words, multiple choice, and agreement with an original.

with LLM("smollm2-135m") as llm:
    evaluate_choices(llm, [read_questions("piqa/valid.jsonl", limit=200)])[0].acc_norm
"""

from jaxinfer.lab.evaluate.agreement import Agreement, evaluate_agreement
from jaxinfer.lab.evaluate.choices import Choices, Question, Questions, evaluate_choices, read_questions
from jaxinfer.lab.evaluate.estimate import Estimate
from jaxinfer.lab.evaluate.last_word import LastWord, Passage, Passages, evaluate_last_word, read_passages
from jaxinfer.lab.evaluate.perplexity import Perplexity, Text, Windowing, evaluate_perplexity, read_text
from jaxinfer.lab.evaluate.report import ModelResults, Report

__all__ = [
    "Agreement",
    "Choices",
    "Estimate",
    "LastWord",
    "ModelResults",
    "Passage",
    "Passages",
    "Perplexity",
    "Question",
    "Questions",
    "Report",
    "Text",
    "Windowing",
    "evaluate_agreement",
    "evaluate_choices",
    "evaluate_last_word",
    "evaluate_perplexity",
    "read_passages",
    "read_questions",
    "read_text",
]

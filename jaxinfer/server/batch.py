"""Several conversations in one body (vLLM's /v1/chat/completions/batch): a choice for each."""

from __future__ import annotations

from typing import Any

from jaxinfer.server.answers import Answer, ChatAnswer, Choice


class BatchChatAnswer(ChatAnswer):
    """The shape of a chat whose choice i answers conversation i. What a chat says once of its only prompt,
    each choice says of its own."""

    def whole(self) -> dict[str, Any]:
        return Answer.whole(self)

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        whole = super()._whole_choice(choice)
        whole |= dict.fromkeys(("prompt_token_ids", "prompt_logprobs"))  # where not asked for
        if self.wanted.token_ids:
            whole["prompt_token_ids"] = list(self._request_of(choice).prompt_token_ids)
        if self.wanted.prompt_logprobs is not None:
            whole["prompt_logprobs"] = self._of_prompt(choice)
        return whole

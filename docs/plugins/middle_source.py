from deft_policies.decoding.drafts import DraftSource


class MiddleSource(DraftSource):
    kind = "middle"

    def __init__(self, target):
        self.middle = (target.action_tokens.first + target.action_tokens.last) // 2

    def draft(self, sequence, depth):
        return [[self.middle] * depth]

from deft_policies.decoding.drafts import DraftSource


class TrendSource(DraftSource):
    kind = "trend"

    def __init__(self, target):
        self.first, self.last = target.action_tokens.first, target.action_tokens.last

    def draft(self, sequence, depth):
        if len(sequence.past) < 2:
            return []
        before, last = sequence.past[-2:]
        moved = [2 * new - old for old, new in zip(before, last, strict=True)]
        kept = [min(max(token, self.first), self.last) for token in moved]
        return [kept[len(sequence.tokens) :]]

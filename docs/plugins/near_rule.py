from deft_policies.decoding.acceptance.rule import LocalRule


class NearRule(LocalRule):
    def accepts(self, drafted, expected, place):
        return abs(drafted - expected) <= 4

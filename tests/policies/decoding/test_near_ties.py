"""In bfloat16 a pass over many nodes rounds unlike a pass over one, so near ties may flip.

Exact match keeps what the pass over the tree says. Every token that differs from plain decoding in
the same format is listed with its margin, led along the tokens that were executed, and explained.
"""

import sys
from dataclasses import dataclass, replace

import torch

from deft_policies.benchmark.audit import last_place
from deft_policies.decoding.decoder import Decoder, DraftModels, build_decoder
from deft_policies.decoding.drafts.eagle import EagleHead, HeadSizes
from deft_policies.decoding.knobs import find_method
from deft_policies.decoding.plan import DraftKind
from deft_policies.model.llama import LlamaDecoder
from tests.policies.decoding.scripts import Session, clock
from tests.tiny_target import WIDTH, fast_target, one_row, random_prompts, tiny_decoder

NUM_SESSIONS = 120
NEAR_TIE_PLACES = 8  # of the largest logit; what two layers of rounding add up to here


@dataclass(frozen=True)
class FlippedToken:
    session: int
    position: int
    margin: float
    threshold: float


def flips_of(decoder: LlamaDecoder, drafted: Decoder, session_number: int) -> list[FlippedToken]:
    prompts = random_prompts(tiny_decoder(), [2 + session_number % 5], session_number)
    prompt = one_row(prompts, 0).embeds[0].bfloat16()
    session = Session.of(1)
    prompts = replace(prompts, embeds=prompts.embeds.bfloat16())
    found = []
    for _ in range(2):
        tokens = drafted.decode(prompts, session.rows, clock())[0].tokens
        for position, token in enumerate(tokens):
            words = decoder.embedding(torch.tensor(tokens[:position], dtype=torch.int64))
            logits = decoder.head(decoder(torch.cat((prompt, words))[None])[0, -1]).float()
            best = logits.topk(2)
            if int(best.indices[0]) != token:
                margin = float(best.values[0] - logits[token])
                threshold = NEAR_TIE_PLACES * last_place(float(best.values[0]))
                found.append(FlippedToken(session_number, position, margin, threshold))
    return found


def test_every_token_that_flips_in_bfloat16_is_a_near_tie() -> None:
    decoder = tiny_decoder().bfloat16()
    torch.manual_seed(0)
    head = EagleHead(HeadSizes(WIDTH, 24, 2, 2, max_positions=64)).requires_grad_(False).bfloat16()
    target = fast_target(decoder)
    flips: list[FlippedToken] = []
    for drafts in ((DraftKind.PREVIOUS, DraftKind.RECYCLED), (DraftKind.HEAD,)):
        method = find_method("lossless").with_drafts(drafts)
        drafted = build_decoder(target, method, DraftModels(head=head))
        for number in range(NUM_SESSIONS):
            flips += flips_of(decoder, drafted, number)
    unexplained = [flip for flip in flips if flip.margin > flip.threshold]
    for flip in flips:
        sys.stdout.write(f"{flip}\n")
    assert unexplained == []
    assert len(flips) < 0.02 * 2 * 2 * NUM_SESSIONS * 7

"""Own drafts of sessions in a grammar on a GPU: the same text as without drafts, by graphs or
launch by launch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.spec.plan import Plan
from outrider.text.tokenizer import Tokenizer
from tests.unit.verifier.device_serving import SAMPLINGS, run_all, serving
from tests.unit.verifier.test_form_drafts import accepted, plan_of
from tests.unit.verifier.test_structured_sessions import FORM, SPEC, texts_of

pytestmark = pytest.mark.gpu
CUDA = "cuda:0"


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize(("placement", "topk"), [("fused", 1), ("colocated", 1), ("fused", 3)])
async def test_own_drafts_change_no_text_and_stand(
    placement: str, topk: int, cuda_graphs: bool, tiny_target: Path, tiny_head: Path
) -> None:
    plan, settings = plan_of(topk)
    tokenizer = Tokenizer.load(tiny_target)
    for name in ("greedy", "coupled"):
        async with serving(tiny_target, device=CUDA) as service:
            plain = await run_all(service, Plan(), SAMPLINGS[name], **SPEC)
        async with serving(
            tiny_target,
            tiny_head,
            device=CUDA,
            placement=placement,
            cuda_graphs=cuda_graphs,
            **settings,
        ) as service:
            drafted = await run_all(service, plan, SAMPLINGS[name], **SPEC)
        assert texts_of(drafted) == texts_of(plain)
        assert accepted(drafted) > 0
        for tokens in texts_of(drafted):
            assert re.fullmatch(FORM.text, tokenizer.decode(tokens[:-1]))

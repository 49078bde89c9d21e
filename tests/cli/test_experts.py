"""`te-hal compare --experts`: a GPT whose layers have a mixture of experts."""

import pytest
import torch
from command_line import TINY_GPT, CommandLine

import te_hal.modules as te
from te_hal import recipe
from te_hal.cli import experts
from te_hal.cli.config import configure
from te_hal.cli.experts import ExpertsLayer
from te_hal.cli.gpt import ByteGpt

CPU = torch.device("cpu")
CONFIG = configure("gpt", width=32, heads=2, sequence=16, batch=4, experts=5, top_k=2)


def layer() -> ExpertsLayer:
    torch.manual_seed(0)
    made = ExpertsLayer(CONFIG, 64, 1, CPU)
    with torch.no_grad():
        made.router.weight.mul_(5)
        for name, parameter in made.named_parameters():
            if name.startswith("fc") and "bias" in name:
                parameter.normal_()
    return made


def test_every_byte_gets_its_experts_weighted_results_as_a_loop_says():
    made, x = layer().eval(), torch.randn(16, 3, 32)
    hidden = x + made.attention(x)
    expected = []
    for row in made.norm(hidden).flatten(0, 1):
        weights, chosen = (made.router.weight @ row).topk(2)
        out = torch.zeros(32)
        for weight, number in zip(weights.softmax(0), chosen.tolist(), strict=True):
            of = {name: getattr(made, name) for name in ("fc1", "fc2")}
            inner = getattr(of["fc1"], f"weight{number}") @ row + getattr(of["fc1"], f"bias{number}")
            inner = torch.nn.functional.gelu(inner, approximate="tanh")
            out = out + weight * (getattr(of["fc2"], f"weight{number}") @ inner + getattr(of["fc2"], f"bias{number}"))
        expected.append(out)
    found = made(x) - hidden
    assert torch.allclose(found.flatten(0, 1), torch.stack(expected), atol=1e-4)


def test_the_balancing_loss_joins_the_backward_in_training_alone(monkeypatch):
    made, x = layer(), torch.randn(16, 3, 32)

    def router_gradient() -> torch.Tensor:
        made.zero_grad()
        made(x).square().mean().backward()
        return made.router.weight.grad.clone()

    trained = router_gradient()
    evaluated = (made.eval(), router_gradient())[1]
    monkeypatch.setattr(experts, "_BALANCE", 0.0)
    without = (made.train(), router_gradient())[1]
    assert torch.equal(evaluated, without)
    assert (trained - without).abs().max() > 1e-5


@pytest.mark.parametrize(
    ("make", "reentrant"),
    [(recipe.DelayedScaling, True), (recipe.MXFP8BlockScaling, False)],
    ids=["delayed", "mxfp8"],
)
def test_a_recomputed_layer_trains_bit_for_bit_alike(make, reentrant):
    results = []
    for again in (False, True):
        config = configure("gpt", width=32, heads=2, sequence=32, batch=4, experts=5, top_k=2, recipes=("mxfp8",))
        torch.manual_seed(0)
        made = ExpertsLayer(config, 64, 1, CPU)
        losses = []
        for seed in range(2):
            torch.manual_seed(seed)
            x = torch.randn(32, 4, 32, requires_grad=True)
            with te.autocast(recipe=make()):
                y = te.checkpoint(made, x, use_reentrant=reentrant) if again else made(x)
            loss = y.square().mean()
            loss.backward()
            losses += [loss.detach(), x.grad]
        results.append([*losses, *(p.grad for p in made.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_experts_share_out_what_a_model_is_trained_on():
    torch.manual_seed(0)
    model = ByteGpt(CONFIG, CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    windows = torch.arange(64).view(4, 16) % 11
    for _ in range(25):
        optimizer.zero_grad()
        with te.autocast(recipe=recipe.Float8CurrentScaling()):
            logits = model(windows)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    assert loss < 1.0
    counts = []
    model.layers[0].router.register_forward_hook(lambda _, __, out: counts.append(out.topk(2).indices.flatten()))
    model(windows)
    assert len(counts[0].bincount(minlength=5).nonzero()) >= 3


def test_a_comparison_with_experts_reports_each_of_them(tmp_path):
    command_line = CommandLine(tmp_path)
    options = (*TINY_GPT, "--experts", "3", "--top-k", "2", "--steps", "2", "--recipe", "delayed", "--sample", "1")
    result = command_line.compare(*options)
    assert result.exit_code == 0, result.stderr
    assert "2 of 3 experts" in result.stdout
    run = command_line.record()["runs"][-1]
    modules = {entry["module"] for entry in run["observed"]["tensors"]}
    assert {f"layers.0.{product}.{number}" for product in ("fc1", "fc2") for number in range(3)} <= modules

"""Nemotron-3 and -4, Minitron."""

from lightning_megatron_rl.models.families.family import Family, Rope

FAMILY = Family(
    "nemotron",
    "NemotronForCausalLM",
    ("megatron.bridge.models.nemotron.nemotron_bridge",),
    name="Nemotron-4, Minitron",
    attention="grouped queries; half of a head is rotated",
    mlp="dense, squared ReLU without a gate",
    refused="attention_bias, mlp_bias",
    rope=Rope(partial=True),
    activation=("hidden_act", "relu2"),
    no_place_for=("attention_bias", "mlp_bias"),
    transformer_engine=False,
)

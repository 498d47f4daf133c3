"""A model's weights on their way to samplers: views of them, the plan of copies, and the transports."""

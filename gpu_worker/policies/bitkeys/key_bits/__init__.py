"""Keys less their mean as two bits a coordinate: those of a prompt's layer, and those that leave the window."""

from gpu_worker.kernels.dispatch import by_device
from gpu_worker.policies.bitkeys.key_bits import reference

padded_length = reference.padded_length
num_code_bytes = reference.num_code_bytes
centre = by_device(reference.centre)
code_prompt = by_device(reference.code_prompt)
code_leaving = by_device(reference.code_leaving)

"""Hands a trained model to other tools: diffusers, peft and ComfyUI."""

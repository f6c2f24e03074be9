"""Poolgate's gateway: one OpenAI-compatible endpoint in front of pools of vLLM servers."""

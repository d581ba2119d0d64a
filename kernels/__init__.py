"""Operations on tensors: a plain torch specification, and faster ones that are tested against it.

Nothing here knows a request, a step or a config; it imports torch and nothing of ours.
"""

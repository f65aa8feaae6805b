"""Tree verification inside SGLang: a plugin for its Triton backend, and a drop-in for its extend kernel.

- :mod:`.plugin` is what SGLang loads; it does nothing unless ``TREEATTN_SGLANG=1``.
- :mod:`.hooks` checks what the plugin needs of the installed SGLang, without importing it.
- :mod:`.backend` is the subclass of SGLang's Triton backend, :mod:`.verify` its steps (layout, groups, plans).
- :mod:`.drop_in` has SGLang's ``extend_attention_fwd`` with its own signature, for other releases and forks.
- :mod:`.extend_call` is one call of that signature in treeattn's words; both of the above go through it.

Only :mod:`.backend` and the body of :func:`.plugin.register` import SGLang.
"""

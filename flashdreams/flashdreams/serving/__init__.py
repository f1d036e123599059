"""Serve a model to people and programs: sessions, a worker of its own for the model, HTTP and WebSocket.

Extra ``flashdreams[serve]``. The event loop's side (all but :mod:`.worker` and :mod:`.steered`) never imports torch, so
that nothing the model does can hold it up.
"""

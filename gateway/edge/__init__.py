"""Where HTTP meets the gateway; Litestar is known here and in app.py only."""

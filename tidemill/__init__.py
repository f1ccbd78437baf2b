"""tidemill: online learning for recommendation models, from event stream to served model."""

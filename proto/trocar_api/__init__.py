"""The wire contract of Trocar: messages, error reasons and the chunk codec, for both ends."""

"""Small models with the habits that tests are about."""

"""The code that Keras calls, in folders by subject. `api` and `bootstrap` import it."""

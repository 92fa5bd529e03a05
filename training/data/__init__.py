"""From files to the token blocks of a step."""

"""`make bench`: Turnout and its peers, interleaved in one run on one machine."""

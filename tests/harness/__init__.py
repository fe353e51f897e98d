"""The one harness through which all tests with several processes go: forked ranks and models small enough for them."""

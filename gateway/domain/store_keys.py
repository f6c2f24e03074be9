"""What the names of all our keys in Redis begin with. In a Redis Cluster it puts them into one hash slot.

So one script may take any of them, one server has all of them, its clock is the only one, and it is there or away for
all of them at once: `gateway/config/redis_client.py` follows whoever serves that slot.
"""

TAG = "{poolgate}"

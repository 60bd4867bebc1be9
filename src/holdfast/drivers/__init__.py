"""What adapters of one technology share.

``postgres``       connections that are sessions, and poolers that are none
``redis_url``      addresses of Redis, also of a service behind Sentinel
``redis``          connections to it, why it does not answer, and whether it is fit to keep counters
``outbound_http``  requests to servers that are not trusted: what an answer may cost
"""

"""What adapters of one technology share.

``postgres``  connections that are sessions, and poolers that are none
"""

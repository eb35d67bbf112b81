"""Where keys and values live: slots, the request table, pools."""

"""What the commands do, without a terminal: functions accept typed requests, return results and report events."""

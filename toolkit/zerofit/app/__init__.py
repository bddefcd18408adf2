"""The commands without a terminal: functions accept typed requests, return results and report events."""

"""What the gateway knows about replicas."""

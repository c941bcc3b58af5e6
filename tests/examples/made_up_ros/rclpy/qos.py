"""How a subscription listens, by name."""

qos_profile_sensor_data = "best effort"

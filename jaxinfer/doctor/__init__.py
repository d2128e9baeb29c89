"""What is wrong, or slow: of an installation (`examine`), and of a server that runs (`diagnosis`)."""

from jaxinfer.doctor.examine import doctor, examine

__all__ = ["doctor", "examine"]

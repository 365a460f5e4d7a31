"""What is done to per-record gradients before they are summed."""

from ownerwise.mechanisms.clipping import AutoS, ClippingRule, Psac, Standard

__all__ = ["AutoS", "ClippingRule", "Psac", "Standard"]

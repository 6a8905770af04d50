"""PyramidKV: SnapKV with budgets that fall from layer to layer."""

"""The outer surfaces of other projects over our objects: code written against them runs by changing its imports."""

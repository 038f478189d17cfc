"""What people would use instead, each written as well as its design allows, and the limits of the parts."""

"""What measures and compares: clocks, tables, exact values, pictures, peers. Not in the wheel."""

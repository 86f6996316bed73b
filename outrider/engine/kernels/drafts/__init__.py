"""What a draft step adds to a matrix product: its inputs, its best children, trees and laws."""

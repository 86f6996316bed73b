"""What a draft step adds to a matrix product: its inputs, its best children, trees and laws.

coupled_topk.py            The children of a tree's rows under the coupled rule.
distribution_kernels.py    Triton kernels of distribution sampling.
distribution_sampling.py   Samples draft tokens from quantised distributions.
growth.py                  EAGLE-2's dynamic draft tree on the device (Li et al.
in_process_distributions.pyDraft distributions of the in-process drafter.
inputs.py                  Where the rows of a draft batch go, and the attention input of an EAGLE-3
                           block.
proposal_layout.py         Positions and masks of given trees.
token_masks.py             Masks draft logits by grammar.
topk.py                    The most probable columns of every row and their log-probabilities, in
                           two passes of tiles.
tree_rank.py               The tree among the candidates of a growth.
"""

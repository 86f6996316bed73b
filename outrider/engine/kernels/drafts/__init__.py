"""Kernels of draft steps: inputs, best children, tree growth and draft distributions.

coupled_topk.py            Top-k draft tokens under the coupled rule: the largest sums of score and
                           shared noise.
distribution_kernels.py    Triton kernels of draft distribution sampling, in the order in which they
                           run.
distribution_sampling.py   Sampling of draft tokens on the device from truncated, quantised
                           distributions.
growth.py                  Dynamic draft tree growth of EAGLE-2 on the device (Li et al. 2024), over
                           fp32 log-prob sums.
in_process_distributions.py Draft distributions of the in-process drafter's chains, indexed by
                           session slot.
inputs.py                  Layout of a draft batch's rows, and the attention input of an EAGLE-3
                           block.
proposal_layout.py         Layout of proposal trees for scoring: position, parent and attention mask
                           of each node.
token_masks.py             Allowed-token masks (grammars) applied to draft logits.
topk.py                    Top-k log-probabilities of draft logits, first per tile of columns, then
                           per row.
tree_rank.py               Final selection of a dynamic draft tree: the best n candidates, parents
                           before children.
"""

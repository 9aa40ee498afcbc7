"""MiniLM's BERT tower against transformers and against itself without padding."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from m1clip.data.captions import drop_tokens
from m1clip.model.pretrained import bert
from model.pretrained.plain_result import assert_inference_matches

SMALL = bert.BertSize(width=16, layers=2, heads=2, hidden=24, positions=12)


def test_unpadded_texts_give_the_plain_result() -> None:
    torch.manual_seed(0)
    tower = bert.BertTower(50, size=SMALL)
    torch.nn.init.normal_(tower.positions)
    ids = torch.randint(1, 50, (6, 8))
    for row, length in enumerate((3, 3, 8, 5, 5, 1)):
        ids[row, length:] = 0
    assert_inference_matches(tower, ids)


def test_bert_matches_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
    )
    theirs = transformers.BertModel(config, add_pooling_layer=False).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tower = bert.BertTower(50, size=SMALL).eval()
    tower.load_state_dict(bert.from_bert(theirs.state_dict(), 2))
    ids = torch.tensor([[5, 9, 7, 2], [8, 3, 0, 0]])
    mask = (ids != 0).float()
    with torch.inference_mode():
        layers = theirs(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        means = [(layer * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) for layer in layers]
        torch.testing.assert_close(tower(ids), torch.cat(means, dim=1), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_bert_ignores_padding_and_dropped_tokens() -> None:
    torch.manual_seed(0)
    tower = bert.BertTower(50, size=SMALL).eval()
    torch.nn.init.normal_(tower.positions)
    shorter = torch.tensor([[2, 5, 7, 3], [2, 9, 10, 3]])
    expected = tower(shorter)
    assert not torch.allclose(expected[0], expected[1], atol=1e-3)
    torch.testing.assert_close(tower(F.pad(shorter, (0, 5))), expected)
    dropped = np.zeros((2, 8), bool)
    dropped[0, [2, 4]] = True
    tokens = np.array([[2, 5, 6, 7, 8, 3, 0, 0], [2, 9, 10, 3, 0, 0, 0, 0]])
    shortened, lengths = drop_tokens(tokens, np.array([6, 4]), dropped, pad_id=0)
    assert lengths.tolist() == [4, 4]
    torch.testing.assert_close(tower(torch.from_numpy(shortened)), expected)

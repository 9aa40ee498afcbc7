"""1: the model that ran and the model that was documented have one name each."""

from m1clip.model.clip import count_parameters
from m1clip.model.presets import list_presets, preset


def test_both_models_have_one_name_and_the_original_size() -> None:
    assert count_parameters(preset("original")) == 76_736_001
    documented = preset("original-documented")
    vision, text = documented.own_towers
    assert (vision.width, vision.layers) == (768, 12)
    assert (text.width, text.layers) == (512, 6)
    assert count_parameters(documented) != count_parameters(preset("original"))
    assert not {"small", "documented", "prior-art"} & set(list_presets())

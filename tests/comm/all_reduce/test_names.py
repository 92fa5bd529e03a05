from tightwire.comm.all_reduce.names import split_all_reduce_names


def test_names_with_commas_and_blanks() -> None:
    split = split_all_reduce_names("ring, flash:int4,int8 ,flash:int6, int6,policy:mix.json")
    assert split == ("ring", "flash:int4,int8", "flash:int6,int6", "policy:mix.json")


def test_an_empty_name_is_kept_for_whoever_refuses_it() -> None:
    assert split_all_reduce_names("") == ("",)
    assert split_all_reduce_names("ring,") == ("ring", "")

from workers.engine_key import engine_key


def test_restart_keeps_the_key_so_that_compiled_code_is_found_again(tmp_path):
    assert engine_key(tmp_path / "state", "chat/0@h") == engine_key(tmp_path / "state", "chat/0@h")


def test_each_worker_and_each_installation_has_a_key_of_its_own(tmp_path):
    places = [("a", "chat/0@h"), ("a", "chat/1@h"), ("b", "chat/0@h")]
    assert len({engine_key(tmp_path / folder, worker) for folder, worker in places}) == 3


def test_only_the_owner_can_read_what_the_keys_are_made_from(tmp_path):
    engine_key(tmp_path / "state", "chat/0@h")
    [secret] = (tmp_path / "state" / "workers").iterdir()
    assert secret.stat().st_mode & 0o777 == 0o600
    assert secret.parent.stat().st_mode & 0o777 == 0o700


def test_a_secret_that_a_full_disk_cut_short_is_made_anew(tmp_path):
    before = engine_key(tmp_path, "chat/0@h")
    (tmp_path / "workers" / "engine.secret").write_bytes(b"")
    after = engine_key(tmp_path, "chat/0@h")
    assert len(after) == 43 and after != before
    assert engine_key(tmp_path, "chat/0@h") == after

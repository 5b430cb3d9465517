"""What is known of the roles of a run, in a real Redis."""


async def test_the_first_life_of_a_role_is_known_by_its_nonce(ledgers):
    lives = [("rollout.0", "a"), ("rollout.0", "a"), ("rollout.0", "b"), ("rollout.1", "b"), ("rollout.0", "a")]
    assert [await ledgers.roles.first_life(*life) for life in lives] == [True, True, False, True, True]

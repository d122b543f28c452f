"""Samples of inner steps: committed with an average, or lost."""

from __future__ import annotations

from torchft.data.local_steps import Account


def trained(account: Account, *steps: int, expected: int = 12) -> Account:
    for own in steps:
        account.trained(own, expected)
    return account


def test_an_average_commits_its_samples_and_the_rest_is_lost() -> None:
    account = trained(Account(), 6, 6)
    assert account.send() == 12
    account.averaged(24)
    assert (account.committed, account.lost, account.open, account.own) == (24, 0, 0, 0)

    trained(account, 6, 6)
    account.send()
    account.averaged(12)  # another group has failed in the meantime
    assert (account.committed, account.lost) == (36, 12)


def test_samples_during_an_average_are_in_the_next_one() -> None:
    account = trained(Account(), 6)
    account.send()
    trained(account, 6)
    account.averaged(12)
    assert (account.committed, account.open, account.own) == (12, 12, 6)
    assert account.send() == 6


def test_a_failed_average_loses_the_samples_of_restored_weights() -> None:
    account = trained(Account(), 6)
    account.send()
    trained(account, 6)
    account.failed(kept=False)
    assert (account.committed, account.lost, account.open, account.own) == (0, 24, 0, 0)


def test_samples_in_kept_weights_are_in_the_next_average() -> None:
    account = trained(Account(), 6)
    account.send()
    account.failed(kept=True)
    trained(account, 6)
    assert account.send() == 12
    account.averaged(24)
    assert (account.committed, account.lost) == (24, 0)


def test_a_heal_takes_over_the_account_and_drops_ones_own_samples() -> None:
    source = trained(Account(committed=24, lost=12), 6, 6)
    target = trained(Account(), 6)
    target.load(source.save())
    assert (target.send(), source.send()) == (0, 12)
    for account in (source, target):
        account.averaged(12)
        assert (account.committed, account.lost, account.open, account.own) == (36, 24, 0, 0)

"""ElasticDataset in groups that train: each sample once an epoch, and the weights of one process."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.integration.cluster import Cluster, Rank, results
from tests.integration.test_loader import SAMPLES, SETTINGS, Training, check, dataset, flat, make_model, make_optimizer
from tests.integration.test_loader import one_process as one_process_of_batches
from torchft import Optimizer
from torchft.dlrover import DataShardService, ElasticDataset


class Samples(ElasticDataset):
    def read_sample(self, index: int) -> Any:
        return dataset()[index]

    def num_samples(self) -> int:
        return SAMPLES


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_sends_its_workers_the_indices(num_workers: int) -> None:
    training = Training(start_with=2, data=Samples(), loader={"num_workers": num_workers})
    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(2)))
    check(training, ended)


def test_a_service_gives_each_rank_its_next_index() -> None:
    seen: Counter[int] = Counter()

    def train(rank: Rank) -> torch.Tensor:
        model = make_model()
        sgd = make_optimizer(model)
        manager = rank.start_manager(
            load_state_dict=model.load_state_dict, state_dict=model.state_dict, use_async_quorum=False
        )
        optimizer = Optimizer(manager, sgd)
        service = DataShardService(manager, SAMPLES, **SETTINGS)
        rank.cluster.wait_for_healthy(2)
        for x, y, indices in DataLoader(Samples(service), batch_sampler=service):
            unit = service.unit
            assert unit is not None and indices.tolist() == list(unit.indices)
            with unit.accumulate(model):
                (nn.functional.mse_loss(model(x), y) * unit.weight).backward()
            seen.update(unit.indices if unit.weight else ())
            if unit.last:
                for parameter in model.parameters():
                    manager.allreduce(parameter.grad).wait()  # type: ignore[arg-type]
                optimizer.step()
                sgd.zero_grad()  # the loader has begun the next step before the first pass
        return flat(model)

    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(train, group=group) for group in range(2)))
    assert seen == Counter(dict.fromkeys(range(SAMPLES), SETTINGS["epochs"]))
    for weights in ended:
        torch.testing.assert_close(weights, one_process_of_batches(), rtol=0, atol=1e-9)

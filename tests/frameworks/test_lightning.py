"""Lightning's Trainer with a runtime equals the plain loop, and its checkpoints have the tables."""

import copy
import importlib
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch.utils._pytree import tree_map

import hostdev
from hostdev.ext.frameworks.lightning import checkpoint_io
from tests.frameworks.cases import adam, ids, loader, loss_of, make_runtime, make_top, plain, weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's that Lightning still calls
    lightning = pytest.importorskip("lightning")
    from lightning.fabric.utilities import move_data_to_device
    from lightning_utilities.core.apply_func import apply_to_collection

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*LeafSpec.*", "ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:.*`ModelCheckpoint.*"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]


def module_class(package=lightning):
    class Module(package.LightningModule):
        def __init__(self, runtime, manual=False):
            super().__init__()
            self.runtime, self.top, self.losses = runtime, make_top(), []
            self.automatic_optimization = not manual

        def training_step(self, item, number):
            loss = loss_of(self.top, *item)
            self.losses.append(loss.item())
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.02)
                optimizer.step()
            return loss

        def validation_step(self, item, number):
            self.log("loss", loss_of(self.top, *item), batch_size=len(item[0][0]))

        def configure_optimizers(self):
            return adam(self.parameters())

    return Module


def fit(
    folder,
    epochs,
    *,
    package=lightning,
    runtime=None,
    manual=False,
    accumulate=1,
    resume=None,
    callbacks=(),
    plugins=(),
    validate=True,
    **options,
):
    """Return the module and the trainer after a number of epochs."""
    runtime = runtime or make_runtime()
    module = module_class(package)(runtime, manual)
    trainer = package.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=accumulate,
        default_root_dir=folder,
        callbacks=list(callbacks),
        plugins=list(plugins) or None,
        enable_checkpointing=bool(callbacks),
        **options,
    )
    validation = runtime.predict_loader(loader(100), ids=ids) if validate else None
    trainer.fit(module, runtime.train_loader(loader(), ids=ids, accumulate=accumulate), validation, ckpt_path=resume)
    return module, trainer


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, {}),
        ({"gradient_clip_val": 0.02}, {"clip": 0.02}),
        ({"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}, {"value": 0.001}),
        ({"manual": True}, {"clip": 0.02}),
        ({"accumulate": 3, "gradient_clip_val": 0.02, "val_check_interval": 5}, {"accumulate": 3, "clip": 0.02}),
        ({"limit_train_batches": 5, "limit_val_batches": 1}, {"batches": 5}),
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_the_trainer_has_the_bits_of_the_plain_loop(tmp_path, options, wanted):
    module, _ = fit(tmp_path, 2, **options)
    losses, tables, _ = plain(2, **wanted)
    assert module.losses == losses
    assert weights(module.runtime) == tables


def test_clipping_takes_the_rows(tmp_path):
    assert plain(1, clip=0.02)[1] != plain(1)[1]


def test_bfloat16(tmp_path):
    module, _ = fit(tmp_path, 2, precision="bf16-mixed", limit_train_batches=4)
    losses, _, _ = plain(2, batches=4)
    assert module.losses == pytest.approx(losses, abs=0.01)


def test_a_loop_is_one_epoch(tmp_path):
    for epochs in (1, 2):
        runtime = make_runtime()
        module = module_class()(runtime)
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        if epochs == 2:
            with pytest.raises(ValueError, match=r"this loop is over; .*, or pass runtime.train_loader\(...\)"):
                trainer.fit(module, runtime.train(loader(), ids=ids))
        else:
            trainer.fit(module, runtime.train(loader(), ids=ids))
        assert module.losses == plain(1)[0]


def test_accumulation_that_the_loader_was_not_given_is_refused(tmp_path):
    runtime = make_runtime()
    module = module_class()(runtime)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=4,
        enable_checkpointing=False,
    )
    with pytest.raises(ValueError, match=r"runtime.train\(..., accumulate=N\)"):
        trainer.fit(module, runtime.train_loader(loader(), ids=ids))


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_a_resumed_run_has_the_bits_of_one_run(tmp_path, name):
    package = pytest.importorskip(name)
    callbacks = importlib.import_module({"lightning": "lightning.pytorch"}.get(name, name) + ".callbacks")

    def checkpoints():
        return callbacks.ModelCheckpoint(tmp_path / "at", monitor="loss", save_top_k=1, save_last=True)

    straight, _ = fit(tmp_path, 4, package=package)
    runtime = make_runtime()
    stop = callbacks.EarlyStopping("loss", patience=5)
    first, _ = fit(
        tmp_path, 2, package=package, runtime=runtime, callbacks=[checkpoints(), stop], plugins=[checkpoint_io(runtime)]
    )
    assert {file.name for file in (tmp_path / "at").glob("*.tables")} == {
        f"{file.name}.tables" for file in (tmp_path / "at").glob("*.ckpt")
    }
    other = make_runtime()
    then, trainer = fit(
        tmp_path,
        4,
        package=package,
        runtime=other,
        callbacks=[checkpoints(), stop],
        plugins=[checkpoint_io(other)],
        resume=tmp_path / "at" / "last.ckpt",
    )
    assert first.losses + then.losses == straight.losses
    assert weights(other) == weights(straight.runtime)
    best = trainer.checkpoint_callback
    [found] = trainer.validate(then, other.predict_loader(loader(100), ids=ids), best.best_model_path, verbose=False)
    assert found["loss"] == best.best_model_score


def test_a_run_resumed_within_an_epoch_goes_on_with_the_batch_after(tmp_path):
    runtime, other = make_runtime(), make_runtime()
    keep = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / "at", every_n_train_steps=21, save_top_k=-1)
    straight, _ = fit(tmp_path, 2, runtime=runtime, callbacks=[keep], plugins=[checkpoint_io(runtime)], validate=False)
    [saved] = (tmp_path / "at").glob("*step=21.ckpt")
    then, _ = fit(tmp_path, 2, runtime=other, plugins=[checkpoint_io(other)], resume=saved, validate=False)
    assert then.losses == straight.losses[21:]
    assert weights(other) == weights(straight.runtime)
    with pytest.raises(
        hostdev.UserError, match=r"the checkpoint was saved at step 21, but the tables are at step 0; save and"
    ):
        fit(tmp_path, 2, resume=saved, validate=False)


def test_checkpoints_without_the_tables(tmp_path):
    keep = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / "at", save_last=True)
    with pytest.warns(
        UserWarning, match=r"saved without the tables; save the tables, too, for example with Trainer\(plugins=\["
    ):
        fit(tmp_path, 1, callbacks=[keep], limit_train_batches=2)
    runtime = make_runtime()
    with pytest.raises(
        hostdev.UserError, match=r"last.ckpt has no tables: it was saved by a Trainer without hostdev's"
    ):
        fit(tmp_path, 2, runtime=runtime, plugins=[checkpoint_io(runtime)], resume=tmp_path / "at" / "last.ckpt")


def test_a_copied_module_shares_the_runtime():
    module = module_class()(make_runtime())
    assert copy.deepcopy(module).runtime is module.runtime
    assert copy.copy(module.runtime) is module.runtime
    with pytest.raises(TypeError, match="a Runtime cannot be pickled, .*save_hyperparameters"):
        pickle.dumps(module.runtime)


def test_rows_and_bags_pass_through_as_they_are():
    runtime = make_runtime()
    with runtime.train(loader(), ids=ids) as loop:
        batch, rows = next(loop)
        bag = hostdev.Bag(batch[0])
        item = {"batch": batch, "rows": rows, "bag": bag}
        cpu = torch.device("cpu")
        for passed in (
            move_data_to_device(item, cpu),
            tree_map(lambda leaf: leaf, item),
            apply_to_collection({"rows": rows}, torch.Tensor, torch.Tensor.double) | {"bag": bag},  # as "64-true" does
        ):
            assert passed["rows"] is rows
            assert passed["bag"] is bag
        assert dict(rows).keys() == rows.keys() == {"user", "film"}
        assert dict(**rows)["film"] is rows["film"] is rows.get("film")
        assert [value.shape for value in rows.values()] == [value.shape for _, value in rows.items()]
        assert "user" in rows and "other" not in rows and rows.get("other") is None
        assert len(rows) == len(list(rows)) == 2
    with pytest.raises(ValueError, match="this batch is over"):
        rows.items()


def test_the_plugin_is_there_where_a_runtime_is():
    program = (
        "import sys, hostdev as h; h.Runtime; h.frameworks.lightning.checkpoint_io; print('lightning' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


class Tuned(module_class()):
    """With a learning rate that the Tuner may set."""

    def __init__(self, runtime, lr=0.02):
        super().__init__(runtime)
        self.lr = lr

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def make_trainer(folder, runtime=None, epochs=1, **options):
    """Return a Trainer, with the tables' plugin if a runtime is given."""
    return lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        plugins=None if runtime is None else [checkpoint_io(runtime)],
        **{"enable_checkpointing": False, **options},
    )


TOLD = "'user', 'film' are at step"


@pytest.mark.parametrize("with_plugin", [False, True])
@pytest.mark.parametrize("search", ["lr_find", "LearningRateFinder"])
def test_a_search_for_a_learning_rate(tmp_path, with_plugin, search):
    runtime = make_runtime()
    module, before = Tuned(runtime), weights(runtime)
    batches = runtime.train_loader(loader(), ids=ids)
    finder = [lightning.pytorch.callbacks.LearningRateFinder(num_training_steps=10)] if search != "lr_find" else []
    trainer = make_trainer(tmp_path, runtime if with_plugin else None, callbacks=finder)

    def run():
        if finder:
            trainer.fit(module, batches)
        else:
            lightning.pytorch.tuner.Tuner(trainer).lr_find(module, batches, num_training=10)
            if with_plugin:
                assert weights(runtime) == before
            trainer.fit(module, batches)

    if not with_plugin:
        with pytest.warns(UserWarning, match=TOLD):
            run()
        return
    run()
    other = make_runtime()
    make_trainer(tmp_path).fit(Tuned(other, module.lr), other.train_loader(loader(), ids=ids))
    assert weights(other) == weights(runtime)


@pytest.mark.parametrize("with_plugin", [False, True])
def test_a_search_for_a_batch_size(tmp_path, with_plugin):
    """The steps of its trials are undone in the tables too, or told of."""
    runtime = make_runtime()
    module, before = Tuned(runtime), weights(runtime)
    module.batch_size = 8
    module.train_dataloader = lambda: runtime.train_loader(loader(), ids=ids)
    module.val_dataloader = lambda: runtime.predict_loader(loader(), ids=ids)
    trainer = make_trainer(tmp_path, runtime if with_plugin else None)
    tuner = lightning.pytorch.tuner.Tuner(trainer)
    tuner.scale_batch_size(module, mode="power", steps_per_trial=3, max_trials=2)
    assert runtime.tables["user"].step == (0 if with_plugin else 6)
    if with_plugin:
        assert weights(runtime) == before
        return
    with pytest.warns(UserWarning, match=TOLD):
        trainer.fit(module)


def best_of(folder, with_plugin, **options):
    """Return a module and a Trainer after two epochs, with a checkpoint of the first."""
    runtime = make_runtime()
    keep = lightning.pytorch.callbacks.ModelCheckpoint(folder / "at", save_top_k=-1, **options)
    module = Tuned(runtime)
    trainer = make_trainer(folder, runtime if with_plugin else None, 2, enable_checkpointing=True, callbacks=[keep])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a checkpoint is being saved without the tables")
        trainer.fit(module, runtime.train_loader(loader(), ids=ids))
    return module, trainer, next((folder / "at").glob("epoch=0*.ckpt"))


@pytest.mark.parametrize("with_plugin", [False, True])
def test_a_module_from_a_checkpoint(tmp_path, with_plugin):
    module, trainer, best = best_of(tmp_path, with_plugin)
    runtime = module.runtime
    other = Tuned.load_from_checkpoint(best, runtime=runtime)
    with pytest.warns(UserWarning, match=rf"step 16 .* {TOLD} 32"):
        trainer.validate(other, runtime.predict_loader(loader(100), ids=ids), verbose=False)
    if not with_plugin:
        return
    [once] = trainer.validate(module, runtime.predict_loader(loader(100), ids=ids), ckpt_path=best, verbose=False)
    for now in (runtime, make_runtime()):
        other = Tuned.load_from_checkpoint(best, runtime=now)
        now.load(f"{best}.tables")
        [again] = trainer.validate(other, now.predict_loader(loader(100), ids=ids), verbose=False)
        assert again == once


@pytest.mark.parametrize("with_plugin", [False, True])
@pytest.mark.parametrize("weights_only", [False, True])
def test_an_evaluation_of_a_checkpoint(tmp_path, with_plugin, weights_only):
    module, trainer, best = best_of(tmp_path, with_plugin, save_weights_only=weights_only)
    batches = module.runtime.predict_loader(loader(100), ids=ids)
    if not with_plugin:
        with pytest.warns(UserWarning, match=rf"{TOLD} 32"):
            trainer.validate(module, batches, ckpt_path=best, verbose=False)
        return
    trainer.validate(module, batches, ckpt_path=best, verbose=False)
    assert module.runtime.pipeline.steps == 16


def averaging(name, **options):
    return getattr(lightning.pytorch.callbacks, name)(**options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("StochasticWeightAveraging", {"swa_lrs": 0.01, "swa_epoch_start": 1}),
        ("WeightAveraging", {}),
        ("EMAWeightAveraging", {"decay": 0.9}),
    ],
)
def test_callbacks_that_average_the_dense_layers_alone(tmp_path, name, options):
    runtime = make_runtime()
    trainer = make_trainer(tmp_path, epochs=3, callbacks=[averaging(name, **options)])
    with pytest.warns(UserWarning, match=r"'user', 'film'.*hostdev.EMA\(table, decay\)") as told:
        trainer.fit(Tuned(runtime), runtime.train_loader(loader(), ids=ids))
    assert sum("hostdev.EMA" in str(one.message) for one in told) == 1


def test_an_average_of_layers_and_tables_is_silent(tmp_path):
    runtime = make_runtime()
    averages = [hostdev.EMA(table, 0.9) for table in runtime.tables.values()]

    class Tables(lightning.pytorch.Callback):
        def on_train_batch_end(self, *_):
            for one in averages:
                one.update()

    trainer = make_trainer(tmp_path, epochs=2, callbacks=[averaging("EMAWeightAveraging", decay=0.9), Tables()])
    trainer.fit(Tuned(runtime), runtime.train_loader(loader(), ids=ids))

"""The parts of a run: plain objects, none a LightningModule or nn.Module."""

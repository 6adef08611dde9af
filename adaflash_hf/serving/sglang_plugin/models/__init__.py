"""SGLang imports every module here and takes the models that each one names in `EntryClass`."""

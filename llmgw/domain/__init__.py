"""Values and enums that every room shares. attrs and the standard library only; nothing here does I/O."""

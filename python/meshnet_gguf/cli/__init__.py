"""The program `meshnet`: one command a module, imported only when it is called."""
